"""LSTM, GRU, RNN and other operators with a state that goes on from step to step."""
