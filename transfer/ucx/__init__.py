"""The UCX transport. Nothing outside imports ucxx; importing this package loads no library."""
