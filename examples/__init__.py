"""Programs that use the package, each a command of its own."""
