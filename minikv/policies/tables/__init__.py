"""The rows of the registry: a file for each kind. Importing these needs no torch."""
