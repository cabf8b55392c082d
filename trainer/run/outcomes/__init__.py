"""How attempts and runs end: kinds of endings, their records, the errors behind them."""
