"""The programs, by the package that they are of; each file has a list ``REFEREES``."""
