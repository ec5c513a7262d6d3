//! The part of the tar format that our archives use: plain files, directories and symbolic links with GNU's long names (tar(5), "GNU
//! Tar Archives"). Everything else is told by its letter, for the reader to refuse; a name or link of more than some KiB never
//! comes into memory.

use std::io::{self, Read, Write};

/// Bytes of a block.
pub const BLOCK: usize = 512;
/// Longest name or target of a link.
pub const MAX_NAME: usize = 4096;

/// What a header is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A plain file.
    File,
    /// A directory.
    Dir,
    /// A symbolic link.
    Link,
}

/// One entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its path; of a directory with a slash at its end.
    pub name: Vec<u8>,
    /// What it is.
    pub kind: Kind,
    /// Where a link points.
    pub target: Vec<u8>,
    /// Its permissions.
    pub mode: u32,
    /// Seconds since 1970.
    pub modified: u64,
    /// Bytes that follow; only a file has some.
    pub size: u64,
}

/// What cannot be read.
#[derive(Debug)]
pub enum BadTar {
    /// It is not one of ours.
    Refused(String),
    /// The stream.
    Io(io::Error),
}

impl From<io::Error> for BadTar {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::UnexpectedEof {
            Self::Refused("it ends in the middle".to_owned())
        } else {
            Self::Io(error)
        }
    }
}

/// Writes the header of an entry; its bytes and [`pad`] follow.
///
/// # Errors
/// Those of `out`.
pub fn write(out: &mut impl Write, entry: &Entry) -> io::Result<()> {
    long(out, b'L', &entry.name)?;
    long(out, b'K', &entry.target)?;
    let letter = match entry.kind {
        Kind::File => b'0',
        Kind::Dir => b'5',
        Kind::Link => b'2',
    };
    out.write_all(&header(letter, entry))
}

fn long(out: &mut impl Write, letter: u8, text: &[u8]) -> io::Result<()> {
    if text.len() <= 100 {
        return Ok(());
    }
    let name = b"././@LongLink".to_vec();
    // With the NUL that ends it.
    let size = text.len() as u64 + 1;
    let entry = Entry { name, kind: Kind::File, target: Vec::new(), mode: 0o644, modified: 0, size };
    out.write_all(&header(letter, &entry))?;
    out.write_all(text)?;
    out.write_all(&[0])?;
    pad(out, size)
}

fn header(letter: u8, entry: &Entry) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    let mut put = |at: usize, bytes: &[u8], most: usize| {
        let length = bytes.len().min(most);
        block[at..at + length].copy_from_slice(&bytes[..length]);
    };
    put(0, &entry.name, 100);
    put(100, format!("{:07o}", entry.mode & 0o7777).as_bytes(), 8);
    put(108, b"0000000", 8);
    put(116, b"0000000", 8);
    put(124, &number(entry.size), 12);
    put(136, &number(entry.modified), 12);
    put(148, b"        ", 8);
    put(156, &[letter], 1);
    put(157, &entry.target, 100);
    put(257, b"ustar  \0", 8);
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

/// Eleven octal digits, or in base 256 where they are not enough.
fn number(value: u64) -> [u8; 12] {
    let mut field = [0; 12];
    if value < 1 << 33 {
        field[..11].copy_from_slice(format!("{value:011o}").as_bytes());
    } else {
        field[0] = 0x80;
        field[4..].copy_from_slice(&value.to_be_bytes());
    }
    field
}

/// Fills the last block of `size` bytes.
///
/// # Errors
/// Those of `out`.
pub fn pad(out: &mut impl Write, size: u64) -> io::Result<()> {
    out.write_all(&[0; BLOCK][..rest(size)])
}

/// Bytes that are missing to whole blocks.
fn rest(size: u64) -> usize {
    match size as usize % BLOCK {
        0 => 0,
        some => BLOCK - some,
    }
}

/// Ends an archive.
///
/// # Errors
/// Those of `out`.
pub fn end(out: &mut impl Write) -> io::Result<()> {
    out.write_all(&[0; 2 * BLOCK])
}

/// Reads the next header; none at the end. The bytes of a file must be read before the next one, see [`skip_pad`].
///
/// # Errors
/// [`BadTar`].
pub fn read(input: &mut impl Read) -> Result<Option<Entry>, BadTar> {
    let refused = |text: &str| BadTar::Refused(text.to_owned());
    let (mut name, mut target) = (None, None);
    loop {
        let mut block = [0; BLOCK];
        input.read_exact(&mut block)?;
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let mut sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        sum = sum - block[148..156].iter().map(|byte| u32::from(*byte)).sum::<u32>() + 8 * u32::from(b' ');
        if parse(&block[148..156]) != Some(u64::from(sum)) {
            return Err(refused("a header is damaged"));
        }
        let size = parse(&block[124..136]).ok_or_else(|| refused("a size is none"))?;
        let kind = match block[156] {
            letter @ (b'L' | b'K') => {
                let slot = if letter == b'L' { &mut name } else { &mut target };
                if slot.is_some() || size == 0 || size > MAX_NAME as u64 {
                    return Err(refused("a name is too long or comes twice"));
                }
                let mut text = vec![0; size as usize];
                input.read_exact(&mut text)?;
                skip_pad(input, size)?;
                *slot = Some(until_nul(&text).to_vec());
                continue;
            }
            b'0' | 0 => Kind::File,
            b'5' => Kind::Dir,
            b'2' => Kind::Link,
            b'1' => return Err(refused("it holds a hard link")),
            b'3' | b'4' | b'6' => return Err(refused("it holds a device or a pipe")),
            other => return Err(BadTar::Refused(format!("it holds an entry of the unknown kind {other:#04x}"))),
        };
        if !block[345..500].iter().all(|byte| *byte == 0) && block[257..263] == *b"ustar\0" {
            return Err(refused("a name is in two parts, which is not ours"));
        }
        if kind != Kind::File && size != 0 {
            return Err(refused("something else than a file has bytes"));
        }
        let mode = parse(&block[100..108]).ok_or_else(|| refused("a mode is none"))?;
        return Ok(Some(Entry {
            name: name.unwrap_or_else(|| until_nul(&block[..100]).to_vec()),
            kind,
            target: target.unwrap_or_else(|| until_nul(&block[157..257]).to_vec()),
            mode: u32::try_from(mode & 0o777).unwrap_or(0),
            modified: parse(&block[136..148]).unwrap_or(0),
            size,
        }));
    }
}

/// Reads what fills the last block of `size` bytes.
///
/// # Errors
/// [`BadTar`].
pub fn skip_pad(input: &mut impl Read, size: u64) -> Result<(), BadTar> {
    let mut block = [0; BLOCK];
    Ok(input.read_exact(&mut block[..rest(size)])?)
}

fn until_nul(text: &[u8]) -> &[u8] {
    text.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// A number in octal digits, or in base 256.
fn parse(field: &[u8]) -> Option<u64> {
    if let [first, rest @ ..] = field
        && first & 0x80 != 0
    {
        let mut value: u64 = u64::from(first & 0x7f);
        for byte in rest {
            value = value.checked_mul(256)?.checked_add(u64::from(*byte))?;
        }
        return Some(value);
    }
    let text = std::str::from_utf8(until_nul(field)).ok()?.trim_matches(' ');
    if text.is_empty() { Some(0) } else { u64::from_str_radix(text, 8).ok() }
}
