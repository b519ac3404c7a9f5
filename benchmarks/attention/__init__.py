"""Times of the paged attention kernels beside the device's own limits."""
