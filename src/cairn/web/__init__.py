"""The web server of a job: HTTP API, dashboard, Prometheus, Arrow Flight."""
