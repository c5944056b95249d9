//! A summary of many measurements.

pub(crate) struct Spread {
    pub(crate) median: f64,
    /// Half of the interquartile range.
    pub(crate) around: f64,
}

impl Spread {
    pub(crate) fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let at = |part: f64| values[((values.len() - 1) as f64 * part).round() as usize];
        Self {
            median: at(0.5),
            around: (at(0.75) - at(0.25)) / 2.0,
        }
    }
}
