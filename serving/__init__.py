"""The service around the model: engine, sessions, API."""
