"""Facts about torch's operators that several rooms need: one table for each."""
