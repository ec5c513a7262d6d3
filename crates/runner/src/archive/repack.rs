//! Archives that come from where the agent has no files itself: out of a container, as plain tar, written by a program that steps may
//! get in the way of. They are judged as every archive is that comes from outside.

use std::io::{self, Read, Write};

use kici_sys::init::tar::{self, Kind};
use sha2::{Digest as _, Sha256};

use super::pack::LEVEL;
use super::unpack::parts;
use super::{ArchiveError, Limits, Links, Packed, shown, stays_inside};

/// Bytes that are read at once.
const PIECE: usize = 64 * 1024;

/// Makes one of our archives of a plain tar stream, entry by entry.
///
/// # Errors
/// [`ArchiveError`]; what was written then is no archive.
pub fn repack(mut input: impl Read, out: impl Write, limits: Limits, links: Links) -> Result<Packed, ArchiveError> {
    let stream = || ArchiveError::io("the archive");
    let mut out = zstd::stream::write::Encoder::new(out, LEVEL).map_err(stream())?;
    let (mut packed, mut entries) = (Packed::default(), 0);
    while let Some(mut entry) = tar::read(&mut input)? {
        entries += 1;
        if entries > limits.entries {
            let most = limits.entries;
            return Err(ArchiveError::TooMuch(format!("there are more than {most} files and directories to keep")));
        }
        let parts = parts(&entry.name)?;
        match entry.kind {
            Kind::Dir => {}
            Kind::Link if entry.target.is_empty() || entry.target.contains(&0) => {
                return Err(ArchiveError::Refused(format!("`{}` is a link to nothing", shown(&entry.name))));
            }
            Kind::Link if links == Links::Inside && !stays_inside(&parts, &entry.target) => {
                let name = shown(&entry.name);
                let text = format!("`{name}` is a link that leaves the workspace; copy what it points to");
                return Err(ArchiveError::Unfit(text));
            }
            Kind::Link => packed.files += 1,
            Kind::File => {
                packed.files += 1;
                packed.bytes = packed.bytes.saturating_add(entry.size);
            }
        }
        if packed.bytes > limits.bytes {
            let most = limits.bytes;
            return Err(ArchiveError::TooMuch(format!("the files have more than {most} bytes, unpacked")));
        }
        let mut name = parts.join(&b'/');
        if entry.kind == Kind::Dir {
            name.push(b'/');
        }
        entry.name = name;
        tar::write(&mut out, &entry).map_err(stream())?;
        if entry.kind == Kind::File {
            if io::copy(&mut input.by_ref().take(entry.size), &mut out).map_err(stream())? < entry.size {
                return Err(ArchiveError::Refused("it ends in the middle".to_owned()));
            }
            tar::skip_pad(&mut input, entry.size)?;
            tar::pad(&mut out, entry.size).map_err(stream())?;
        }
    }
    tar::end(&mut out).map_err(stream())?;
    out.finish().and_then(|mut out| out.flush()).map_err(stream())?;
    Ok(packed)
}

/// The digests (SHA-256) of plain files that a tar stream holds, which must be these in this order and nothing else.
///
/// # Errors
/// [`ArchiveError`].
pub fn contents(mut input: impl Read, names: &[String]) -> Result<Vec<[u8; 32]>, ArchiveError> {
    let mut digests = Vec::with_capacity(names.len());
    while let Some(entry) = tar::read(&mut input)? {
        let wanted = names.get(digests.len()).map(String::as_bytes);
        if entry.kind != Kind::File || wanted != Some(&entry.name) {
            return Err(ArchiveError::Unfit(format!("`{}` changed while it was read", shown(&entry.name))));
        }
        let (mut hash, mut left) = (Sha256::new(), entry.size);
        let mut buffer = vec![0; PIECE];
        while left > 0 {
            let most = usize::try_from(left).map_or(PIECE, |left| left.min(PIECE));
            match input.read(&mut buffer[..most]).map_err(ArchiveError::io(shown(&entry.name)))? {
                0 => return Err(ArchiveError::Refused("it ends in the middle".to_owned())),
                n => {
                    hash.update(&buffer[..n]);
                    left -= n as u64;
                }
            }
        }
        tar::skip_pad(&mut input, entry.size)?;
        digests.push(hash.finalize().into());
    }
    match names.get(digests.len()) {
        None => Ok(digests),
        Some(name) => Err(ArchiveError::Unfit(format!("`{name}` went away while it was read"))),
    }
}
