"""Places requests on workers by prefix match and by backlog of uncached tokens."""
