"""One suite per seam, run against every implementation."""
