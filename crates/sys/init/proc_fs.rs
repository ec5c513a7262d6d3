//! Who is whose child.

use std::collections::HashMap;
use std::fs;

use crate::sys::{SIGKILL, send};

/// Every process but this one, with its parent.
pub fn parents() -> HashMap<i32, i32> {
    let mut all = HashMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let Ok(stat) = fs::read(format!("/proc/{pid}/stat")) else { continue };
        // The name may hold anything, also brackets and spaces; what follows its last bracket does not (proc_pid_stat(5)).
        let rest = stat.iter().rposition(|b| *b == b')').map_or(&[][..], |at| &stat[at + 1..]);
        let rest = String::from_utf8_lossy(rest);
        let mut fields = rest.split_ascii_whitespace();
        let (state, parent) = (fields.next().unwrap_or_default(), fields.next().and_then(|field| field.parse().ok()));
        if let Some(parent) = parent
            && !matches!(state, "Z" | "X")
            && pid != 1
        {
            all.insert(pid, parent);
        }
    }
    all
}

/// Ends all descendants of a process that `spared` does not name, nor what is below those. Returns how many.
pub fn kill_below(root: i32, spared: &[i32]) -> u32 {
    let parents = parents();
    let is_below = |mut pid: i32| {
        // A loop cannot be: parents are older, but they are read one after the other.
        for _ in 0..parents.len() + 1 {
            if spared.contains(&pid) {
                return false;
            }
            match parents.get(&pid) {
                Some(parent) if *parent == root => return true,
                Some(parent) => pid = *parent,
                None => return false,
            }
        }
        false
    };
    let mut killed = 0;
    for pid in parents.keys().copied().filter(|pid| is_below(*pid)) {
        killed += u32::from(send(pid, SIGKILL));
    }
    killed
}
