//! Signed addresses: each lets whoever has it do one thing with one object for a short time.

use std::time::Duration;

use hmac::{Hmac, KeyInit as _, Mac as _};
use kici_engine::time::Ts;
use sha2::Sha256;
use zeroize::Zeroizing;

/// How long an object can be fetched.
pub(super) const GET_LIFE: Duration = Duration::from_secs(15 * 60);
/// How long an object can be sent.
pub(super) const PUT_LIFE: Duration = Duration::from_secs(60 * 60);
/// What all addresses begin with.
pub(super) const ROOT: &str = "/objects/v1";

/// What an address allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    /// Fetch an object; its name is the object's.
    Get,
    /// Send an upload; its name is the upload's id.
    Put,
}

impl Verb {
    const fn word(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::Put => "put",
        }
    }
}

/// An address that does not let anybody in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BadUrl {
    /// Not signed by this installation, or for something else.
    Forged,
    /// Its time is over.
    Expired,
}

/// Makes and judges signatures.
pub(crate) struct Signer {
    key: Zeroizing<[u8; 32]>,
}

impl Signer {
    /// With a key that all orchestrators of the installation share.
    pub(crate) fn new(key: Zeroizing<[u8; 32]>) -> Self {
        Self { key }
    }

    /// Path and query of an address that is good until `expires`.
    pub(super) fn url(&self, verb: Verb, name: &str, expires: Ts) -> String {
        let at = seconds(expires);
        let signature = hex::encode(self.mac(verb, name, at).finalize().into_bytes());
        let kind = match verb {
            Verb::Get => "blobs",
            Verb::Put => "uploads",
        };
        format!("{ROOT}/{kind}/{name}?expires={at}&signature={signature}")
    }

    /// Whether the address allows `verb` on `name` now.
    pub(super) fn check(&self, verb: Verb, name: &str, expires: i64, signature: &str, now: Ts) -> Result<(), BadUrl> {
        let given = hex::decode(signature).map_err(|_| BadUrl::Forged)?;
        // In constant time, and before the time is looked at: who cannot sign learns nothing.
        self.mac(verb, name, expires).verify_slice(&given).map_err(|_| BadUrl::Forged)?;
        if seconds(now) > expires { Err(BadUrl::Expired) } else { Ok(()) }
    }

    fn mac(&self, verb: Verb, name: &str, expires: i64) -> Hmac<Sha256> {
        // HMAC takes keys of every length (RFC 2104), so there is always one.
        let mut mac = Hmac::<Sha256>::new_from_slice(self.key.as_slice()).expect("HMAC takes keys of every length");
        mac.update(format!("kici-object-1\n{}\n{expires}\n{name}", verb.word()).as_bytes());
        mac
    }
}

fn seconds(at: Ts) -> i64 {
    at.as_micros().div_euclid(1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(url: &str) -> (i64, String) {
        let query = url.split_once('?').unwrap().1;
        let of = |name: &str| query.split('&').find_map(|pair| pair.strip_prefix(name)).unwrap();
        (of("expires=").parse().unwrap(), of("signature=").to_owned())
    }

    #[test]
    fn an_address_is_good_for_one_thing_until_its_time() {
        let signer = Signer::new(Zeroizing::new([7; 32]));
        let now = Ts::from_micros(1_800_000_000_000_000);
        let url = signer.url(Verb::Get, "cache/a/b", now.plus(GET_LIFE));
        assert!(url.starts_with("/objects/v1/blobs/cache/a/b?expires="), "{url}");
        let (expires, signature) = parts(&url);
        let check = |verb, name: &str, expires, signature: &str, now| signer.check(verb, name, expires, signature, now);
        assert_eq!(check(Verb::Get, "cache/a/b", expires, &signature, now), Ok(()));
        assert_eq!(check(Verb::Get, "cache/a/b", expires, &signature, now.plus(GET_LIFE)), Ok(()));
        let over = now.plus(GET_LIFE + Duration::from_secs(1));
        assert_eq!(check(Verb::Get, "cache/a/b", expires, &signature, over), Err(BadUrl::Expired));
        for (verb, name, expires) in [
            (Verb::Put, "cache/a/b", expires),
            (Verb::Get, "cache/a/c", expires),
            (Verb::Get, "cache/a/b", expires + 3600),
        ] {
            assert_eq!(check(verb, name, expires, &signature, now), Err(BadUrl::Forged));
        }
        for bad in ["", "zz", &signature[..32], &"0".repeat(64)] {
            assert_eq!(check(Verb::Get, "cache/a/b", expires, bad, now), Err(BadUrl::Forged), "{bad}");
        }
        let other = Signer::new(Zeroizing::new([8; 32]));
        assert_eq!(other.check(Verb::Get, "cache/a/b", expires, &signature, now), Err(BadUrl::Forged));
    }
}
