"""What a training costs: its clock, throughput and memory."""
