"""HTTP API, orchestration of a request, configuration and launch: the one composition root."""
