"""HTTP only: routes, schemas, chat encodings and output parsers."""
