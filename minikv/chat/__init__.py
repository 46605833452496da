"""A conversation: documents and questions in, text and a report out."""
