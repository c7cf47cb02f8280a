"""Results as text, JSON, HTML and plots. Takes result types, returns strings; prints nothing."""
