"""The job as a graph, before Spark sees it."""
