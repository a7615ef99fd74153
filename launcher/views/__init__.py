"""What people look at: reports and the page to play with."""
