"""What each command takes on the command line. `main` imports the module of the one typed."""
