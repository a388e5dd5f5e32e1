"""What each lab asks for, counts and compares: a module for each."""
