//! Sizes as people write them: `512MiB`, `4GiB`.

/// Text that is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// Not in the form.
    #[error("expected a size such as \"512MiB\"")]
    Syntax,
    /// More than 2^63 - 1 bytes.
    #[error("a size is at most 8EiB - 1")]
    TooLarge,
}

const UNITS: [(&str, u32); 5] = [("B", 0), ("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)];

/// Reads a whole number with one of `B KiB MiB GiB TiB`, in bytes.
pub fn parse(text: &str) -> Result<u64, SizeError> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).ok_or(SizeError::Syntax)?;
    let (number, unit) = text.split_at(digits);
    let (_, shift) = UNITS.iter().find(|(name, _)| *name == unit).ok_or(SizeError::Syntax)?;
    if number.is_empty() {
        return Err(SizeError::Syntax);
    }
    let number: u64 = number.parse().map_err(|_| SizeError::TooLarge)?;
    number.checked_mul(1 << shift).filter(|bytes| *bytes <= i64::MAX as u64).ok_or(SizeError::TooLarge)
}

/// What somebody who wrote this may have meant: `4Gi`, `4G`, `4gb` are `4GiB`.
pub fn suggest(text: &str) -> Option<String> {
    let text = text.trim().to_ascii_lowercase();
    let digits = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = text.split_at(digits);
    let unit = match unit.trim() {
        "k" | "ki" | "kb" | "kib" => "KiB",
        "m" | "mi" | "mb" | "mib" => "MiB",
        "g" | "gi" | "gb" | "gib" => "GiB",
        "t" | "ti" | "tb" | "tib" => "TiB",
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
            ("512MiB", Ok(512 << 20)),
            ("4GiB", Ok(4 << 30)),
            ("0B", Ok(0)),
            ("4", Err(SizeError::Syntax)),
            ("GiB", Err(SizeError::Syntax)),
            ("4Gi", Err(SizeError::Syntax)),
            ("4 GiB", Err(SizeError::Syntax)),
            ("", Err(SizeError::Syntax)),
            ("8388608TiB", Err(SizeError::TooLarge)),
            ("99999999999999999999B", Err(SizeError::TooLarge)),
        ];
        for (text, expected) in cases {
            assert_eq!(parse(text), expected, "{text}");
        }
        assert_eq!(suggest("4Gi").as_deref(), Some("4GiB"));
        assert_eq!(suggest("512 mb").as_deref(), Some("512MiB"));
        assert_eq!(suggest("many"), None);
    }
}
