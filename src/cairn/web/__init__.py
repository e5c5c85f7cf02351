"""What a browser, a client or Prometheus sees of a job: HTTP, pages, Arrow Flight."""
