"""Network links and traffic."""
