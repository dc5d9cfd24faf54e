"""The command line: one module per subcommand; the only code that reads argv and prints."""
