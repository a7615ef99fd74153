"""What a run will be, before it is paid for."""
