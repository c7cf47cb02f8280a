"""What torch's operators are: one table for each question that several rooms ask of them."""
