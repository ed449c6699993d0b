"""Loading of the model, and the memory and token budgets of an engine."""
