"""Code that runs in the driver."""
