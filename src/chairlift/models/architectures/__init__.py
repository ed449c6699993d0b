"""One file for each family of models: its declaration, its readers of files, and the names of its tensors."""
