"""Files in a folder or an object store."""
