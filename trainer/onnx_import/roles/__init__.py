"""What each stored tensor is: a trained weight, a running statistic or a constant."""
