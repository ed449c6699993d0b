"""The command line: one module for each command, and the groups of options that commands share."""
