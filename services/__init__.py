"""HTTP API, orchestration of a request, configuration, command line and launch: the one composition root."""
