"""What people look at: reports, the page to play with, TensorBoard."""
