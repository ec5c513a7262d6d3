//! Damage.

/// Numbers from a seed (xorshift64*).
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        // Zero would stay zero.
        Self((seed ^ 0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Below `end`; 0 when that is 0.
    pub(super) fn below(&mut self, end: usize) -> usize {
        if end == 0 { 0 } else { usize::try_from(self.next() % end as u64).unwrap_or(0) }
    }
}

/// Pieces that mean something to one of the readers.
const PIECES: [&str; 48] = [
    "\n",
    "\t",
    " ",
    ":",
    ": ",
    "- ",
    "[",
    "]",
    "{",
    "}",
    "\"",
    "'",
    "|",
    ">",
    "&a ",
    "*a",
    "<<: ",
    "---\n",
    "!x ",
    "#",
    "${{",
    "}}",
    "null",
    "true",
    "-1",
    "9223372036854775808",
    "1e999",
    "\\",
    "/",
    "!",
    "**",
    "(?i)",
    "(",
    ")",
    "$",
    "$.a[*]",
    "..",
    "@",
    "has(",
    ".map(x, ",
    " in ",
    " ? ",
    "\u{0}",
    "\u{feff}",
    "é",
    "\u{2028}",
    "jobs",
    "on",
];

/// A member of the corpus with one to eight changes.
pub(super) fn mutated(corpus: &[Vec<u8>], random: &mut Random, max: usize) -> Vec<u8> {
    let mut bytes = corpus.get(random.below(corpus.len())).cloned().unwrap_or_default();
    for _ in 0..=random.below(8) {
        change(&mut bytes, corpus, random);
    }
    bytes.truncate(max);
    bytes
}

fn change(bytes: &mut Vec<u8>, corpus: &[Vec<u8>], random: &mut Random) {
    let at = random.below(bytes.len() + 1);
    let length = 1 + random.below(32);
    let end = (at + length).min(bytes.len());
    match random.below(8) {
        0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
        1 if at < bytes.len() => bytes[at] = u8::try_from(random.below(256)).unwrap_or(0),
        2 => drop(bytes.drain(at.min(end)..end)),
        3 => {
            let copy = bytes[at.min(end)..end].to_vec();
            let to = random.below(bytes.len() + 1);
            bytes.splice(to..to, copy);
        }
        // Nesting, the enemy of parsers that recurse.
        4 => {
            let piece = PIECES[random.below(PIECES.len())].repeat(1 + random.below(200));
            bytes.splice(at..at, piece.bytes());
        }
        5 => {
            let other = &corpus[random.below(corpus.len())];
            let from = random.below(other.len() + 1);
            let to = (from + random.below(512)).min(other.len());
            bytes.splice(at..at, other[from..to].iter().copied());
        }
        // A whole line elsewhere: the structure of YAML is in its lines.
        6 => {
            let lines: Vec<&[u8]> = bytes.split_inclusive(|b| *b == b'\n').collect();
            let line = lines.get(random.below(lines.len())).map(|line| line.to_vec()).unwrap_or_default();
            let to = lines.iter().take(random.below(lines.len() + 1)).map(|line| line.len()).sum::<usize>();
            bytes.splice(to..to, line);
        }
        _ => {
            let piece = PIECES[random.below(PIECES.len())];
            bytes.splice(at.min(end)..end, piece.bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_makes_the_same_damage() {
        let corpus = vec![b"on: push\njobs: {}\n".to_vec(), b"[1]".to_vec()];
        let make = |seed| {
            let mut random = Random::new(seed);
            (0..100).map(|_| mutated(&corpus, &mut random, 4096)).collect::<Vec<_>>()
        };
        assert_eq!(make(3), make(3));
        assert_ne!(make(3), make(4));
        assert_eq!(mutated(&[Vec::new()], &mut Random::new(0), 0), Vec::<u8>::new());
    }
}
