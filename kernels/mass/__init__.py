"""The attention that keys receive, for the policies."""
