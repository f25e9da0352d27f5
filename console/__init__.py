"""What people use: the command line, reports and the demo."""
