//! Durations as people write them: `90s`, `30m`, `1h30m`, `2d`.

use std::time::Duration;

/// Longest duration: a year.
pub const MAX: Duration = Duration::from_secs(366 * 24 * 3600);

/// Text that is not a duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DurationError {
    /// Not in the form.
    #[error("expected a duration such as \"30m\"")]
    Syntax,
    /// Zero.
    #[error("a duration must be longer than nothing")]
    Zero,
    /// More than [`MAX`].
    #[error("a duration is at most 366d")]
    TooLong,
}

/// Reads whole numbers with the units `d`, `h`, `m`, `s`, each at most once and the larger first.
pub fn parse(text: &str) -> Result<Duration, DurationError> {
    const UNITS: [(char, u64); 4] = [('d', 86_400), ('h', 3600), ('m', 60), ('s', 1)];
    let mut rest = text;
    let mut units = UNITS.as_slice();
    let mut seconds: u64 = 0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or(DurationError::Syntax)?;
        let number = &rest[..digits];
        let unit = rest[digits..].chars().next().ok_or(DurationError::Syntax)?;
        let at = units.iter().position(|(name, _)| *name == unit).ok_or(DurationError::Syntax)?;
        if number.is_empty() {
            return Err(DurationError::Syntax);
        }
        let number: u64 = number.parse().map_err(|_| DurationError::TooLong)?;
        let add = number.checked_mul(units[at].1).ok_or(DurationError::TooLong)?;
        seconds = seconds.checked_add(add).ok_or(DurationError::TooLong)?;
        units = &units[at + 1..];
        rest = &rest[digits + unit.len_utf8()..];
    }
    match seconds {
        _ if text.is_empty() => Err(DurationError::Syntax),
        0 => Err(DurationError::Zero),
        _ if seconds > MAX.as_secs() => Err(DurationError::TooLong),
        _ => Ok(Duration::from_secs(seconds)),
    }
}

/// The form that [`parse`] reads, in whole seconds.
pub fn format(duration: Duration) -> String {
    let mut seconds = duration.as_secs();
    let mut text = String::new();
    for (unit, size) in [('d', 86_400), ('h', 3600), ('m', 60), ('s', 1)] {
        if seconds >= size {
            text.push_str(&format!("{}{unit}", seconds / size));
            seconds %= size;
        }
    }
    if text.is_empty() { "0s".to_owned() } else { text }
}

/// What somebody who wrote this may have meant: a bare number is minutes, long unit names are short ones.
pub fn suggest(text: &str) -> Option<String> {
    let text = text.trim().to_ascii_lowercase();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    if number.is_empty() {
        return None;
    }
    let unit = match unit.trim() {
        "" | "min" | "mins" | "minute" | "minutes" => 'm',
        "sec" | "secs" | "second" | "seconds" => 's',
        "hr" | "hrs" | "hour" | "hours" => 'h',
        "day" | "days" => 'd',
        _ => return None,
    };
    let suggestion = format!("{number}{unit}");
    parse(&suggestion).is_ok().then_some(suggestion)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms() {
        let cases = [
            ("90s", Ok(90)),
            ("30m", Ok(1800)),
            ("1h30m", Ok(5400)),
            ("2d", Ok(172_800)),
            ("1d2h3m4s", Ok(93_784)),
            ("", Err(DurationError::Syntax)),
            ("30", Err(DurationError::Syntax)),
            ("m", Err(DurationError::Syntax)),
            ("30 m", Err(DurationError::Syntax)),
            ("30m1h", Err(DurationError::Syntax)),
            ("1m1m", Err(DurationError::Syntax)),
            ("-1m", Err(DurationError::Syntax)),
            ("1.5h", Err(DurationError::Syntax)),
            ("5ü", Err(DurationError::Syntax)),
            ("0s", Err(DurationError::Zero)),
            ("99999999999999999999s", Err(DurationError::TooLong)),
            ("9999999999999999999d", Err(DurationError::TooLong)),
            ("400d", Err(DurationError::TooLong)),
        ];
        for (text, expected) in cases {
            assert_eq!(parse(text), expected.map(Duration::from_secs), "{text}");
        }
    }

    #[test]
    fn format_is_read_back() {
        for seconds in [1, 59, 60, 3600, 3661, 86_400, 90_061, 366 * 86_400] {
            let duration = Duration::from_secs(seconds);
            assert_eq!(parse(&format(duration)), Ok(duration));
        }
    }

    #[test]
    fn suggestions() {
        assert_eq!(suggest("30").as_deref(), Some("30m"));
        assert_eq!(suggest("10 minutes").as_deref(), Some("10m"));
        assert_eq!(suggest("2hours").as_deref(), Some("2h"));
        assert_eq!(suggest("soon"), None);
        assert_eq!(suggest("0"), None);
    }
}
