"""The command line: one small file a subcommand; alone reads argv, prints, exits."""
