"""What gives the ops of a model function their meaning."""
