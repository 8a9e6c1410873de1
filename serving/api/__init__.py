"""The HTTP interface: OpenAI's, and sessions. A plain ASGI application over any engines; serving/deployments.py is Ray."""
