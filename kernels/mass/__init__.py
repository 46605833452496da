"""The attention that rows receive, for the policies."""
