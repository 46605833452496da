"""The flags and arguments of each command. `main` imports the module of the command typed."""
