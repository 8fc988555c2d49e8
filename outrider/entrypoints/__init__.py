"""HTTP, command line and page: everything a user touches."""
