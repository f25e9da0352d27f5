"""Programs that help in testing; not tests."""
