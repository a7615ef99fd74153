"""Pages and tables that people look at: reports, facts of jobs, and the page to play with."""
