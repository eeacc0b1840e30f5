/**
 * Light or dark: as the system has it, until the button is pressed. Not a module, so that it comes before the first paint.
 */

'use strict';

{
  const root = document.documentElement;
  const system = matchMedia('(prefers-color-scheme: dark)');
  const isDark = () => (root.dataset.theme ? root.dataset.theme === 'dark' : system.matches);
  const chosen = localStorage.getItem('omni.theme');
  if (chosen) root.dataset.theme = chosen;

  document.addEventListener('DOMContentLoaded', () => {
    const button = document.getElementById('theme');
    const show = () => button.setAttribute('aria-pressed', String(isDark()));
    button.addEventListener('click', () => {
      root.dataset.theme = isDark() ? 'light' : 'dark';
      localStorage.setItem('omni.theme', root.dataset.theme);
      show();
    });
    system.addEventListener('change', show);
    show();
  });
}
