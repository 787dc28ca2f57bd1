"""The documents' experiments at our size; README.md says which script is whose."""
