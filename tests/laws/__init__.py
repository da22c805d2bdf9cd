"""The laws: derivatives, training and traffic are those of the unsharded model, on every kind of ranks."""
