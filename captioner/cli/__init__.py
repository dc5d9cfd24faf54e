"""The command line, with one module per subcommand. Only this package reads argv and prints."""
