"""Programs of other libraries, as they are: a run of its own, with the extra ``referees``."""
